"""The hicache command line."""

import typer

app = typer.Typer(no_args_is_help=True)


@app.command()
def info() -> None:
    """Show versions, devices and paths."""
