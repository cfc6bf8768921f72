"""Where adapters come from. A source lists and fetches files; which ones is not its decision."""
