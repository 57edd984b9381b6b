"""packhouse.trainer."""
