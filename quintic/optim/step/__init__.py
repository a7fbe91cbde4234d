"""Running a plan: passes, messages, averages, agreements."""
