"""packhouse.worker: from source to shards on Ray, and from shards to plans."""
