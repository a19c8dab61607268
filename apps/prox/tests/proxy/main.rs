//! D2Prox against real and misbehaving origins: flows in memory, and real sockets.

mod cache;
mod corpus;
mod door;
mod door_http2;
mod egress;
mod enrol;
mod fetch;
mod limits;
mod links;
mod memory;
mod relay;
mod removal;
mod resume;
mod serving;
mod sockets;
mod strict;
mod succession;
mod support;
mod tls;
mod tunnel;
mod upload;
mod upload_resume;
