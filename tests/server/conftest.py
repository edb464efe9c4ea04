"""Models for the tests of the server."""

from tiny_models import models as models
