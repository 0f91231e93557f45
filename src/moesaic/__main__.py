from moesaic.cli.main import main

main()
