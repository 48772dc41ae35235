"""Public-domain prose that ships with the project; ``README.md`` names its source."""
