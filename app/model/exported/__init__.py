"""app/model/exported."""
