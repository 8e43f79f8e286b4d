"""What people watch while jobs run."""
