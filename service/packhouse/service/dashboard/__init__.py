"""packhouse.service.dashboard: pages for people, drawn here, that need nothing from elsewhere."""
