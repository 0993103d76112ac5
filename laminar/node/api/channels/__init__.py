"""Routes of channels: create and describe channels, receive and acknowledge their records."""
