from moesaic.cli import main

main()
