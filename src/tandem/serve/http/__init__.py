"""What every Tandem HTTP service shares: authentication, refusals, bounds, OpenAPI, start and stop."""
