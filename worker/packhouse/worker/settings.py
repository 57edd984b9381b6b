"""Settings of the workers: the only file of this portion that reads environment variables."""

import os


def s3_endpoint() -> str | None:
    """Return the address of the object store with the sources, where it is not AWS's: ``AWS_ENDPOINT_URL_S3`` or
    ``AWS_ENDPOINT_URL``. Keys and region are found where AWS's tools find them: ``AWS_ACCESS_KEY_ID``,
    ``AWS_SECRET_ACCESS_KEY``, ``AWS_REGION``, their files, the machine's role.
    """
    return os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or None


def source_roots() -> str | None:
    """Return the folders and prefixes that may be read, with commas between them: PACKHOUSE_SOURCE_ROOTS.

    None, where it is not set, is everything; nothing may be read where it is empty.
    """
    return os.environ.get("PACKHOUSE_SOURCE_ROOTS")
