"""packhouse.client: submit jobs, pull plans, stream packed batches."""
