"""Ten minutes of chaos: everything that clients do to a service, at once, and a ledger of it.

attempt   the bytes of a request and how its client behaves -> what came back
clients   who takes part: kinds of requests, and what each may end in
ledger    everything that was sent -> what broke a promise
service   the service under chaos, with one more model, whose network misbehaves on command
"""
