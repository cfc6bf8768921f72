"""Sources of adapters. A source lists and fetches files; callers choose which."""
