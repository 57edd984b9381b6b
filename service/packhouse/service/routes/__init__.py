"""packhouse.service.routes: one noun a file."""
