//! The egress filter, seen from a device.

use std::sync::Arc;

use crate::support::*;
use cedos_lab_rig::origin::ScriptedOrigin;
use cedos_prox::{Prox, ProxConfig};

fn closed(names: Names) -> Arc<Prox> {
    Prox::with_resolver(
        ProxConfig {
            allow_private: false,
            ..config()
        },
        Arc::new(names),
    )
    .unwrap()
}

#[tokio::test]
async fn private_addresses_are_refused_in_every_spelling() {
    let prox = closed(Names(vec![]));
    for host in [
        "127.0.0.1",
        "0x7f.1",
        "2130706433",
        "0177.0.0.1",
        "127.1",
        "[::1]",
        "[::ffff:127.0.0.1]",
        "[64:ff9b::7f00:1]",
        "[2002:7f00:1::]",
        "169.254.169.254",
        "10.0.0.1",
        "0.0.0.0",
        "[fe80::1]",
        "[fd00:ec2::254]",
    ] {
        let answer = ask(&prox, get(&format!("http://{host}/"), ""))
            .await
            .whole();
        assert_eq!(answer.status, 403, "{host}");
        assert!(
            answer
                .header("proxy-status")
                .contains("error=destination_ip_prohibited")
        );
        let request = format!("CONNECT {host}:80 HTTP/1.1\r\nHost: h\r\n\r\n");
        assert_eq!(ask(&prox, request).await.status, 403, "CONNECT {host}");
    }
}

#[tokio::test]
async fn metadata_services_are_refused_where_private_networks_are_allowed() {
    let rebound = ("rebound.example", "fd20:ce::254".parse().unwrap());
    let prox = Prox::with_resolver(config(), Arc::new(Names(vec![rebound]))).unwrap();
    for host in [
        "169.254.169.254",
        "100.100.100.200",
        "[fd20:ce::254]",
        "[fd00:c1::a9fe:a9fe]",
        "[fd00:42::42]",
        "[64:ff9b:1::a9fe:a9fe]",
        "[64:ff9b:1:a9fe:a9:fe00::]",
        "[fd12:3456::a9fe:a9fe]",
        "[2002:a9fe:a9fe::1]",
        "[2001:0:4136:e378:8000:63bf:5601:5601]",
        "rebound.example",
    ] {
        let request = get(&format!("http://{host}/"), "");
        let answer = ask(&prox, request).await.whole();
        assert_eq!(answer.status, 403, "{host}");
        let request = format!("CONNECT {host}:80 HTTP/1.1\r\nHost: h\r\n\r\n");
        assert_eq!(ask(&prox, request).await.status, 403, "CONNECT {host}");
    }
}

#[tokio::test]
async fn a_name_that_leads_to_a_private_address_is_refused() {
    let prox = closed(Names(vec![(
        "inside.example",
        "192.168.1.1".parse().unwrap(),
    )]));
    let answer = ask(&prox, get("http://inside.example/", "")).await.whole();
    assert_eq!(answer.status, 403);
    let request = "CONNECT inside.example:443 HTTP/1.1\r\nHost: h\r\n\r\n";
    assert_eq!(ask(&prox, request).await.status, 403);
}

#[tokio::test]
async fn a_redirect_to_a_private_address_is_refused() {
    let secret = ScriptedOrigin::fixed("HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\nsecret").await;
    let port = secret.address.port();
    let outside = ScriptedOrigin::fixed(format!(
        "HTTP/1.1 302 R\r\nLocation: http://127.0.0.2:{port}/\r\nContent-Length: 0\r\n\r\n"
    ))
    .await;
    // Only the outside's address is allowed; the redirect leads to another one of loopback.
    let prox = Prox::new(ProxConfig {
        allow_private: false,
        allow_nets: vec!["127.0.0.1/32".parse().unwrap()],
        ..config()
    })
    .unwrap();
    let answer = ask(&prox, get(&outside.url("/"), "")).await.whole();
    assert_eq!(answer.status, 403);
    assert_eq!(outside.requests().len(), 1);
    assert!(secret.requests().is_empty());
}

#[tokio::test]
async fn refused_ports_are_refused_for_urls_and_tunnels() {
    let prox = prox();
    assert_eq!(
        ask(&prox, get("http://127.0.0.1:25/", "")).await.status,
        403
    );
    let request = "CONNECT mail.example:25 HTTP/1.1\r\nHost: h\r\n\r\n";
    assert_eq!(ask(&prox, request).await.status, 403);
}

#[tokio::test]
async fn only_the_allowed_addresses_of_a_name_are_dialled() {
    let origin = ScriptedOrigin::fixed("HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n").await;
    let prox = Prox::with_resolver(
        ProxConfig {
            allow_private: false,
            allow_nets: vec!["127.0.0.1/32".parse().unwrap()],
            ..config()
        },
        Arc::new(Names(vec![
            ("mixed.example", "10.0.0.1".parse().unwrap()),
            ("mixed.example", "127.0.0.1".parse().unwrap()),
        ])),
    )
    .unwrap();
    let url = format!("http://mixed.example:{}/", origin.address.port());
    assert_eq!(ask(&prox, get(&url, "")).await.status, 200);
}
