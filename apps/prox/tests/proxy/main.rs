//! D2Prox against real and misbehaving origins: flows in memory, and real sockets.

mod corpus;
mod door;
mod egress;
mod fetch;
mod relay;
mod resume;
mod serving;
mod sockets;
mod support;
mod tls;
mod tunnel;
mod upload;
mod upload_resume;
