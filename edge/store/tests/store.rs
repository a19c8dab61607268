//! Ownership of records in a real `redis-server`: races, stale writers, lost answers, a full store, and one that does
//! not honour conditions.

use std::io::{BufRead, BufReader, Read, Write};
use std::sync::Arc;

use bytes::Bytes;
use cedos_lab_rig::redis::RedisServer;
use cedos_lab_rig::wait::until_blocking;
use d2tp_driver::{
    JournalBatch, JournalFlowKey, JournalSessionKey, OwnershipClaim, PublicKey, RecordStore,
    SharedRecords, StoredRecord,
};
use d2tp_session::FlowId;
use d2tp_store::{RedisStore, RedisStoreOptions, StoreHealth};
use proptest::prelude::*;

fn open_at(url: String, node: &str) -> Result<Arc<RedisStore>, String> {
    open_as(url, node, node)
}

fn open_as(url: String, node: &str, holder: &str) -> Result<Arc<RedisStore>, String> {
    let options = RedisStoreOptions {
        url,
        node: node.to_owned(),
        holder: holder.to_owned(),
        prefix: "test".to_owned(),
        object_of: Arc::new(|memo| Some(u64::from_be_bytes(memo.try_into().ok()?))),
    };
    RedisStore::open(options)
        .map(Arc::new)
        .map_err(|error| error.to_string())
}

fn open(redis: &RedisServer, node: &str) -> Arc<RedisStore> {
    let store = open_at(redis.url(), node).unwrap();
    store.begin();
    store
}

fn key(n: u64) -> JournalSessionKey {
    JournalSessionKey {
        peer: PublicKey([n as u8; 32]),
        instance: n,
    }
}

fn wait<T>(future: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread()
        .build()
        .unwrap()
        .block_on(future)
}

fn claim(store: &Arc<RedisStore>, n: u64, epoch: u32) -> bool {
    let claimed = wait(store.claim(key(n), epoch)).unwrap();
    matches!(claimed, OwnershipClaim::Owned { .. })
}

/// Writes a record that only this test reads. Returns whether the store took it.
fn write(store: &Arc<RedisStore>, n: u64, text: &str) -> bool {
    let mut batch = JournalBatch::default();
    let record = StoredRecord::now(text.as_bytes().to_vec());
    batch.sessions.insert(key(n), Some(record));
    store.commit(&batch).unwrap().lost.is_empty()
}

fn read(store: &Arc<RedisStore>, n: u64) -> Option<String> {
    let found = wait(store.look_up(key(n))).unwrap()?;
    Some(String::from_utf8(found.record?).unwrap())
}

fn batch_of_memo(n: u64, memo: Option<u64>) -> JournalBatch {
    let mut batch = JournalBatch::default();
    let flow = JournalFlowKey {
        session: key(n),
        flow: FlowId(1),
    };
    let memo = memo.map(|object| Bytes::copy_from_slice(&object.to_be_bytes()));
    batch.memos.insert(flow, memo);
    batch
}

#[test]
fn of_many_nodes_that_race_for_a_record_one_owns_it() {
    let Some(redis) = RedisServer::start() else {
        return;
    };
    let nodes: Vec<_> = (0..4).map(|n| open(&redis, &format!("n{n}"))).collect();
    for epoch in 1..=100 {
        let claims: Vec<_> = nodes.iter().map(|node| node.claim(key(1), epoch)).collect();
        let owned = claims.into_iter().map(|claim| wait(claim).unwrap());
        let owned = owned.filter(|claim| matches!(claim, OwnershipClaim::Owned { .. }));
        assert_eq!(owned.count(), 1, "epoch {epoch}");
    }
}

#[test]
fn a_stale_writer_is_refused_and_hears_that_it_lost() {
    let Some(redis) = RedisServer::start() else {
        return;
    };
    let (a, b) = (open(&redis, "a"), open(&redis, "b"));
    assert!(claim(&a, 1, 5) && write(&a, 1, "of a"));
    assert!(!claim(&b, 1, 5), "an epoch counts once");
    assert!(claim(&b, 1, 6) && write(&b, 1, "of b"));
    assert!(a.owns(&key(1)), "it has not heard of it");
    assert!(!write(&a, 1, "late"));
    assert!(!a.owns(&key(1)));
    assert_eq!(read(&a, 1).as_deref(), Some("of b"));
    // A session that ended does not come back by a late write either.
    let mut end = JournalBatch::default();
    end.sessions.insert(key(1), None);
    assert!(b.commit(&end).unwrap().lost.is_empty());
    assert!(!claim(&a, 1, 6));
    assert!(claim(&a, 1, 7) && read(&a, 1).is_none());
}

#[test]
fn a_claim_whose_answer_was_lost_has_the_same_result_again() {
    let Some(redis) = RedisServer::start() else {
        return;
    };
    let (a, b) = (open(&redis, "a"), open(&redis, "b"));
    assert!(claim(&a, 1, 3));
    redis.pause();
    // The command lies in the store's socket, and is carried out when the store goes on.
    assert!(wait(a.claim(key(1), 4)).is_err());
    assert_eq!(a.health(), StoreHealth::Away);
    redis.resume();
    assert!(claim(&a, 1, 4), "applied or not, the answer is the same");
    assert!(claim(&a, 1, 4));
    assert!(!claim(&b, 1, 4));
}

#[test]
fn a_write_of_an_earlier_connection_never_undoes_a_later_one() {
    let Some(redis) = RedisServer::start() else {
        return;
    };
    let a = open(&redis, "a");
    for round in 0..3 {
        assert!(claim(&a, 1, round + 1) && write(&a, 1, "old"));
        redis.pause();
        let mut batch = JournalBatch::default();
        batch
            .sessions
            .insert(key(1), Some(StoredRecord::now(b"lost".to_vec())));
        assert!(a.commit(&batch).is_err());
        redis.resume();
        assert!(write(&a, 1, "new"));
        // Whatever still lay in the first connection has been answered before this.
        for _ in 0..20 {
            assert_eq!(read(&a, 1).as_deref(), Some("new"));
        }
    }
}

#[test]
fn a_full_store_takes_removals_only_and_nothing_in_part() {
    let Some(redis) = RedisServer::start() else {
        return;
    };
    let a = open(&redis, "a");
    assert!(claim(&a, 1, 1) && write(&a, 1, "kept"));
    assert!(claim(&a, 2, 1) && write(&a, 2, "ends"));
    redis.set_full(true);
    let mut batch = batch_of_memo(1, Some(9));
    batch
        .sessions
        .insert(key(1), Some(StoredRecord::now(b"no".to_vec())));
    let refused = a.commit(&batch).unwrap_err().to_string();
    assert!(refused.contains("is full"), "{refused}");
    assert_eq!(a.health(), StoreHealth::Full);
    assert_eq!(read(&a, 1).as_deref(), Some("kept"));
    assert!(wait(a.look_up(key(1))).unwrap().unwrap().memos.is_empty());
    let mut end = JournalBatch::default();
    end.sessions.insert(key(2), None);
    a.commit(&end).unwrap();
    assert_eq!(read(&a, 2), None);
    assert_eq!(
        a.health(),
        StoreHealth::Full,
        "it has answered, and is full"
    );
    redis.set_full(false);
    // It is asked now and then, should there be nothing to write.
    a.begin();
    until_blocking("it has room", || a.health() == StoreHealth::Ready);
    assert!(a.commit(&batch).unwrap().lost.is_empty());
    assert_eq!(read(&a, 1).as_deref(), Some("no"));
}

#[test]
fn records_survive_a_store_that_is_killed() {
    let Some(mut redis) = RedisServer::start() else {
        return;
    };
    let a = open(&redis, "a");
    assert!(claim(&a, 1, 1) && write(&a, 1, "kept"));
    redis.kill();
    assert!(wait(a.look_up(key(1))).is_err());
    redis.start_again();
    until_blocking("it is back", || {
        let _ = wait(a.look_up(key(1)));
        a.health() == StoreHealth::Ready
    });
    assert_eq!(read(&a, 1).as_deref(), Some("kept"));
    assert!(write(&a, 1, "again"));
}

#[test]
fn an_object_is_free_when_no_memo_names_it_and_no_process_holds_it() {
    let Some(redis) = RedisServer::start() else {
        return;
    };
    let (a, b) = (open(&redis, "a"), open(&redis, "b"));
    wait(a.hold(7)).unwrap();
    assert!(claim(&a, 1, 1) && claim(&b, 2, 1));
    a.commit(&batch_of_memo(1, Some(7))).unwrap();
    b.commit(&batch_of_memo(2, Some(7))).unwrap();
    a.commit(&batch_of_memo(1, None)).unwrap();
    wait(a.let_go(7)).unwrap();
    let exists = || {
        redis
            .ask(&["--scan", "--pattern", "test:r*"])
            .lines()
            .count()
    };
    assert_eq!(exists(), 1, "b's flow names it");
    // It names another one now.
    b.commit(&batch_of_memo(2, Some(8))).unwrap();
    assert_eq!(wait(b.next_free_object()).unwrap(), 7);
    assert_eq!(exists(), 1, "the other one");
    // What a process held that is gone is let go of by the next one of its node.
    wait(a.hold(9)).unwrap();
    drop(a);
    let again = open(&redis, "a");
    assert_eq!(wait(again.next_free_object()).unwrap(), 9);
}

#[test]
fn a_note_is_created_once() {
    let Some(redis) = RedisServer::start() else {
        return;
    };
    let (a, b) = (open(&redis, "a"), open(&redis, "b"));
    assert!(a.replace_note(b"x", None, Some(b"1")).unwrap());
    assert!(!b.replace_note(b"x", None, Some(b"2")).unwrap());
    assert!(!b.replace_note(b"x", Some(b"0"), Some(b"2")).unwrap());
    assert!(b.replace_note(b"x", Some(b"1"), Some(b"2")).unwrap());
    assert_eq!(a.note(b"x").unwrap().as_deref(), Some(&b"2"[..]));
}

#[test]
fn a_name_that_another_node_has_is_refused_and_an_upgrade_of_the_node_is_not() {
    let Some(redis) = RedisServer::start() else {
        return;
    };
    let running = open(&redis, "a");
    wait(running.hold(7)).unwrap();
    let refused = open_as(redis.url(), "a", "another directory").unwrap_err();
    assert!(refused.contains("another node \"a\""), "{refused}");
    // The next process of the same node changes nothing before the first one has ended.
    let next = open_at(redis.url(), "a").unwrap();
    let held = || redis.ask(&["--scan", "--pattern", "test:r*"]);
    assert_eq!(held().lines().count(), 1);
    assert!(wait(running.hold(8)).is_ok());
    drop(running);
    next.begin();
    let mut free = [
        wait(next.next_free_object()).unwrap(),
        wait(next.next_free_object()).unwrap(),
    ];
    free.sort_unstable();
    assert_eq!(free, [7, 8]);
    assert_eq!(held(), "");
}

/// When a session leaves the store, in seconds; none if never.
fn seconds_left(redis: &RedisServer, n: u64) -> Option<u64> {
    let now: u64 = redis.ask(&["TIME"]).lines().next()?.parse().ok()?;
    let ends = redis.ask(&["ZRANGE", "test:d", "0", "-1", "WITHSCORES"]);
    let ends: Vec<&str> = ends.lines().collect();
    assert_eq!(ends.len(), 2, "session {n} alone: {ends:?}");
    let ends: f64 = ends[1].parse().ok()?;
    Some((ends / 1_000.0) as u64 - now)
}

#[test]
fn a_claim_that_no_record_follows_does_not_stay_for_weeks() {
    let Some(redis) = RedisServer::start() else {
        return;
    };
    let a = open(&redis, "a");
    assert!(claim(&a, 1, 1));
    assert!(seconds_left(&redis, 1).unwrap() <= 3600);
}

#[test]
fn losses_that_a_failed_commit_found_are_heard_of() {
    let Some(redis) = RedisServer::start() else {
        return;
    };
    let (a, b) = (open(&redis, "a"), open(&redis, "b"));
    assert!(claim(&a, 1, 5) && claim(&a, 2, 5) && claim(&b, 1, 6));
    // The removal is carried out, and finds the loss; the record does not fit.
    redis.set_full(true);
    let mut batch = JournalBatch::default();
    batch.sessions.insert(key(1), None);
    let record = StoredRecord::now(b"no room".to_vec());
    batch.sessions.insert(key(2), Some(record));
    assert!(a.commit(&batch).is_err());
    redis.set_full(false);
    assert_eq!(wait(a.next_lost()).unwrap(), key(1));
    assert!(!a.owns(&key(1)) && a.owns(&key(2)));
}

#[test]
fn a_store_that_evicts_records_is_refused() {
    let Some(redis) = RedisServer::start() else {
        return;
    };
    redis.ask(&["CONFIG", "SET", "maxmemory", "100mb"]);
    redis.ask(&["CONFIG", "SET", "maxmemory-policy", "allkeys-lru"]);
    let refused = open_at(redis.url(), "a").unwrap_err();
    assert!(refused.contains("set it to noeviction"), "{refused}");
}

/// A store that takes every command and ignores its conditions.
fn careless_store() -> String {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("redis://{}", listener.local_addr().unwrap());
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            std::thread::spawn(move || serve_careless(stream));
        }
    });
    url
}

fn serve_careless(mut stream: std::net::TcpStream) -> Option<()> {
    let mut input = BufReader::new(stream.try_clone().ok()?);
    let mut line = String::new();
    loop {
        let mut number = |prefix: char| {
            line.clear();
            input.read_line(&mut line).ok()?;
            line.trim().strip_prefix(prefix)?.parse::<usize>().ok()
        };
        let words = number('*')?;
        let mut command = Vec::new();
        for _ in 0..words {
            line.clear();
            input.read_line(&mut line).ok()?;
            let len: usize = line.trim().strip_prefix('$')?.parse().ok()?;
            let mut word = vec![0; len + 2];
            input.read_exact(&mut word).ok()?;
            word.truncate(len);
            command.push(String::from_utf8_lossy(&word).into_owned());
        }
        let answer = match command[0].to_ascii_uppercase().as_str() {
            "EVALSHA" => "*3\r\n$5\r\nowned\r\n$1\r\n0\r\n$0\r\n\r\n",
            "INFO" => "$13\r\nmaxmemory:0\r\n\r\n",
            "DEL" | "ZREM" => ":1\r\n",
            "SCRIPT" => "$1\r\nx\r\n",
            _ => "+OK\r\n",
        };
        stream.write_all(answer.as_bytes()).ok()?;
    }
}

#[test]
fn a_store_that_ignores_conditions_is_refused_with_a_sentence() {
    let refused = open_at(careless_store(), "a").unwrap_err();
    assert!(
        refused.contains("let a record be created twice"),
        "{refused}"
    );
    assert!(refused.contains("two nodes could wake one download"));
}

/// What a node does to the one record of a test.
#[derive(Clone, Copy, Debug)]
enum NodeAction {
    /// Claims it with the epoch after the greatest so far, less this.
    Claim { behind: u32 },
    /// Writes it.
    Write,
    /// Ends it.
    End,
}

fn actions() -> impl Strategy<Value = Vec<(usize, NodeAction)>> {
    let action = prop_oneof![
        3 => (0..3u32).prop_map(|behind| NodeAction::Claim { behind }),
        4 => Just(NodeAction::Write),
        1 => Just(NodeAction::End),
    ];
    prop::collection::vec((0..3usize, action), 1..40)
}

#[test]
fn a_store_does_what_the_model_of_ownership_says() {
    let Some(redis) = RedisServer::start() else {
        return;
    };
    let nodes: Vec<_> = (0..3).map(|n| open(&redis, &format!("n{n}"))).collect();
    let next_key = std::cell::Cell::new(1_000);
    let mut runner = proptest::test_runner::TestRunner::new(ProptestConfig {
        cases: 100,
        failure_persistence: None,
        ..ProptestConfig::default()
    });
    let result = runner.run(&actions(), |actions| {
        let n = next_key.get();
        next_key.set(n + 1);
        // The model: who owns the record with which epoch, and what it says.
        let mut owner: Option<(usize, u32)> = None;
        let mut text: Option<String> = None;
        for (step, (node, action)) in actions.into_iter().enumerate() {
            let store = &nodes[node];
            match action {
                NodeAction::Claim { behind } => {
                    let greatest = owner.map_or(0, |(_, epoch)| epoch);
                    let epoch = (greatest + 1).saturating_sub(behind).max(1);
                    let may = owner
                        .is_none_or(|(of, held)| epoch > held || (epoch == held && of == node));
                    prop_assert_eq!(claim(store, n, epoch), may, "step {}", step);
                    if may {
                        owner = Some((node, epoch));
                    }
                }
                NodeAction::Write => {
                    let believes = store.owns(&key(n));
                    let is_owner = owner.is_some_and(|(of, _)| of == node);
                    let said = format!("{step}");
                    let taken = write(store, n, &said);
                    // Without a claim nothing is sent, so nothing is lost.
                    prop_assert_eq!(taken, !believes || is_owner, "step {}", step);
                    if believes && is_owner {
                        text = Some(said);
                    }
                }
                NodeAction::End => {
                    let believes = store.owns(&key(n));
                    let mut end = JournalBatch::default();
                    end.sessions.insert(key(n), None);
                    let report = store.commit(&end).unwrap();
                    let is_owner = owner.is_some_and(|(of, _)| of == node);
                    prop_assert_eq!(report.lost.is_empty(), !believes || is_owner);
                    if believes && is_owner {
                        text = None;
                    }
                }
            }
            prop_assert_eq!(read(store, n), text.clone(), "step {}", step);
        }
        Ok(())
    });
    result.unwrap();
}
