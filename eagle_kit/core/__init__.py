"""Plain data shared by every layer: errors, speculation shapes, requests, statistics. No models here."""
