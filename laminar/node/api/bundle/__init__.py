"""What a node says of itself for those who help its operators: an allow-list, without data and secrets."""
