"""Warren."""
