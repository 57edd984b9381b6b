"""packhouse.worker."""
