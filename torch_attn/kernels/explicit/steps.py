"""The order in which a work item's steps visit its tiles."""
