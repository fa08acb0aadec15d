"""What applications use: authoring, engine, client, application, configuration and CLI."""
