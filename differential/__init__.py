"""Warren and RabbitMQ side by side: the same program of AMQP methods against both, and everything they answer compared.

    python -m differential --programs 200 --seed 1

wire.py speaks to a broker, programs.py makes programs, compare.py runs one against both, accepted.py lists where they may
differ and why, rabbit.py has the RabbitMQ.
"""
