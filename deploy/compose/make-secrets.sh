#!/bin/sh
# Makes the secrets of compose.yaml, each once, in the folder "secrets" beside it.
set -eu
cd "$(dirname "$0")"
umask 077
mkdir -p secrets
cd secrets

random() { od -An -N24 -tx1 /dev/urandom | tr -d ' \n'; }

# Containers read them as users of their own; the folder is closed to all others on this host.
write() {
    if [ ! -e "$1" ]; then
        cat > "$1"
        chmod 444 "$1"
    fi
}

random | write database_password
printf 'postgresql://packhouse:%s@database/packhouse\n' "$(cat database_password)" | write database_url
random | write ray_token
random | write grafana_password
random | write s3_secret
write s3_credentials <<END
[default]
aws_access_key_id = packhouse
aws_secret_access_key = $(cat s3_secret)
END
write s3_server.json <<END
{
  "identities": [
    {
      "name": "packhouse",
      "credentials": [{"accessKey": "packhouse", "secretKey": "$(cat s3_secret)"}],
      "actions": ["Admin", "Read", "Write", "List"]
    }
  ]
}
END
