//! Tests of what a flow may spend on metered links.

use crate::support::{active, at, device, server};
use cedos_lab_rig::wait::{until, within};
use d2tp_driver::{ProvidedLink, ProvidedLinks};
use d2tp_links::CostClass;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

/// The bytes that a flow has received before it may pay.
const FIRST: usize = 40_000;

#[tokio::test]
async fn a_budget_is_for_all_links_together_and_counts_from_when_it_was_given() {
    let (server, links) = (server(), ProvidedLinks::new());
    let device = device(&server, &links, links.clone()).await;
    links.add(ProvidedLink::new("cell", at(4)).with_class(CostClass::Metered));
    links.add(ProvidedLink::new("other", at(5)).with_class(CostClass::Metered));
    let mut near = device.open(d2tp_driver::FlowSettings::default()).unwrap();
    device.allow_paid(&near, true, None);
    near.write_all(b"!").await.unwrap();
    let mut far = within(server.accept()).await.unwrap();
    until("both answer", || {
        ["cell", "other"]
            .iter()
            .all(|name| !active(&device, name).is_empty())
    })
    .await;
    far.write_all(&vec![1; FIRST]).await.unwrap();
    let mut got = vec![0; FIRST];
    within(near.read_exact(&mut got)).await.unwrap();
    let first = device.paid_bytes(&near);
    assert!(first >= FIRST as u64, "{first}");
    assert!(first < 2 * FIRST as u64, "{first} counted of {FIRST}");

    let carried = || -> u64 { device.link_statuses().iter().map(|way| way.payload.0).sum() };
    let before = carried();
    device.allow_paid(&near, false, None);
    let budget = 300_000;
    device.allow_paid(&near, true, Some(budget));
    assert_eq!(
        device.paid_bytes(&near),
        0,
        "what it had before counts again"
    );
    let (mut tail, mut head) = tokio::io::split(near);
    let reader = tokio::spawn(async move {
        let mut piece = vec![0; 65_536];
        let mut got = 0;
        while let Ok(bytes) = tail.read(&mut piece).await
            && bytes > 0
        {
            got += bytes as u64;
        }
        got
    });
    let writer =
        tokio::spawn(async move { far.write_all(&vec![2; 4_000_000]).await.map(|()| far) });
    let paid = || carried() - before;
    until("most of it is used", || paid() > budget * 8 / 10).await;
    // sleep: the test is about what is paid within a second
    tokio::time::sleep(std::time::Duration::from_secs(1)).await;
    assert!(paid() <= budget, "{} of {budget}", paid());
    writer.abort();
    reader.abort();
    let _ = head.shutdown().await;
}

#[tokio::test]
async fn the_next_flow_has_the_path_of_one_that_paid_and_ended_and_what_that_paid_is_known() {
    let (server, links) = (server(), ProvidedLinks::new());
    let device = device(&server, &links, links.clone()).await;
    links.add(ProvidedLink::new("cell", at(6)).with_class(CostClass::Metered));
    let mut carried_by = Vec::new();
    for _ in 0..3 {
        let mut near = device.open(d2tp_driver::FlowSettings::default()).unwrap();
        device.allow_paid(&near, true, None);
        near.write_all(b"?").await.unwrap();
        near.shutdown().await.unwrap();
        let mut far = within(server.accept()).await.unwrap();
        far.write_all(&vec![1; FIRST]).await.unwrap();
        far.shutdown().await.unwrap();
        let mut got = Vec::new();
        within(near.read_to_end(&mut got)).await.unwrap();
        until("it has ended", || near.end().is_some()).await;
        // It ended faster than links are updated.
        let paid = device.paid_bytes_now(&near);
        assert!(paid > FIRST as u64, "{paid}");
        device.allow_paid(&near, false, None);
        carried_by.push(active(&device, "cell"));
    }
    assert_eq!(carried_by[0].len(), 1);
    assert!(carried_by.iter().all(|path| *path == carried_by[0]));
}
