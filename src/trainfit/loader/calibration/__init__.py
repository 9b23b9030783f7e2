"""The model's constants, fitted to a probe's runs, and these runs corrected for slow cores."""
