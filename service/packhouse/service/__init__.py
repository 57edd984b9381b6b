"""packhouse.service."""
