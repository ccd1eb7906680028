"""Reading that several tasks share."""
