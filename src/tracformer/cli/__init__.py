"""The command line: one file a verb, loaded only when its verb is called."""
