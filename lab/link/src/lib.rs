//! Models of links as pure queues: rate, delay, loss, outages, traces.
