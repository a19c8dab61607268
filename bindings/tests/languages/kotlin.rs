//! Kotlin's example: coroutines over a D2TP flow, and OkHttp through D2Prox. If its tools or files
//! of Maven Central are missing, the test prints a message and ends.

use std::future::pending;
use std::io;
use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;

use cedos_prox::{Prox, ProxConfig, Resolve, serve};
use d2tp_driver::{Admission, EndpointConfig, SecretKey, Server, ServerOptions};
use futures_util::future::BoxFuture;

use crate::examples;
use crate::surroundings::Surroundings;

/// A resolver with two names that no other resolver has.
struct Names;

impl Resolve for Names {
    fn resolve<'a>(&'a self, name: &'a str) -> BoxFuture<'a, io::Result<Vec<IpAddr>>> {
        let found = match name {
            "one.example" | "two.example" => Ok(vec![IpAddr::V4(Ipv4Addr::LOCALHOST)]),
            _ => Err(io::Error::other("no such name")),
        };
        Box::pin(std::future::ready(found))
    }
}

/// Starts a D2Prox in its own thread; returns its address.
fn proxy() -> String {
    let (tell, address) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build();
        runtime.unwrap().block_on(async {
            let server = Server::bind(ServerOptions {
                listen: "127.0.0.1:0".parse().unwrap(),
                key: SecretKey::from_bytes([8; 32]),
                admission: Admission::Anybody,
                config: EndpointConfig::default(),
            });
            let server = Arc::new(server.unwrap());
            let config = ProxConfig {
                allow_any_client: true,
                allow_private: true,
                ..Default::default()
            };
            let prox = Prox::with_resolver(config, Arc::new(Names));
            let place = format!("d2tp://{}/{}", server.local_addr(), server.public_key());
            tell.send(place).unwrap();
            serve(server, prox.unwrap(), pending::<()>()).await;
        });
    });
    address.recv().unwrap()
}

#[test]
fn kotlin_suspends_over_a_flow_and_okhttp_fetches_through_the_proxy() {
    let around = Surroundings::new();
    let Some(example) = examples::kotlin(around.folder.path()) else {
        return;
    };
    let [server, ..] = &around.arguments;
    let said = around.output_of(&example, &[server.clone(), proxy()]);
    for line in [
        "echo ok\n",
        "cancel ok\n",
        "deadline ok: the deadline passed\n",
        "listen ok\n",
        "alone ok\n",
        "http ok: hello\n",
        "refused: the proxy refuses (502): ",
        "https ok: hello from one.example\n",
        "https ok: hello from two.example\n",
        "all ok\n",
    ] {
        assert!(said.contains(line), "{line:?} is missing:\n{said}");
    }
}
