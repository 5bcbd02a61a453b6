"""What a run is asked to do: frozen, checked, written by hand in TOML. No torch here."""
