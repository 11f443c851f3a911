"""The tiers: where bytes lie. No tier imports another, and none decides anything."""
