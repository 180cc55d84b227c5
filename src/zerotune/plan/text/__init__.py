"""Plans, estimates and advice as reports and as data."""
