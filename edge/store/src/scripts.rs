//! The store's side of each operation: a Lua script, which Redis and Valkey run as one step.
//!
//! ```text
//!  P s PEER INSTANCE   hash   e epoch · o process · n node · v writes · t when · r record · mFLOW memo · xFLOW object
//!  P f PROCESS         text   the number of the process's newest connection
//!  P n NAME            text   a note
//!  P r OBJECT          set    flows whose memos name the object, and processes that hold it (h PROCESS)
//!  P h PROCESS         set    objects that the process holds
//!  P p NODE            set    processes of the node
//!  P l NODE            text   whose name it is now, for a while: the holder, a state directory
//!  P d                 zset   sessions by the time at which they end
//! ```
//!
//! `P` is the prefix of one operator's key. Every script that writes begins with the number of its connection. A
//! command that was sent on an earlier connection of the process, and arrives late, finds a greater number and changes
//! nothing, so writes are never applied out of order.
//!
//! A script without `allow-oom` is refused as a whole by a store that is full, so none is applied in part.

use std::sync::LazyLock;

/// What a script does to the store, and therefore which stores take it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ScriptEffect {
    /// The script only reads: a replica and a full store run it, too.
    Reads,
    /// The script writes no more than it removes, or very little: a full store runs it, and a replica does not.
    NeedsNoRoom,
    /// The script adds to the store: only one runs it that is neither full nor a replica.
    Writes,
}

impl ScriptEffect {
    fn flags(self) -> &'static str {
        match self {
            ScriptEffect::Reads => " flags=no-writes",
            ScriptEffect::NeedsNoRoom => " flags=allow-oom",
            ScriptEffect::Writes => "",
        }
    }
}

/// A script and its digest, by which it is called.
pub(crate) struct StoreScript {
    pub(crate) effect: ScriptEffect,
    pub(crate) text: String,
    pub(crate) digest: String,
}

impl StoreScript {
    fn new(effect: ScriptEffect, body: &str) -> StoreScript {
        let text = format!("#!lua{}\n{body}", effect.flags());
        let digest = redis::Script::new(&text).get_hash().to_owned();
        StoreScript {
            effect,
            text,
            digest,
        }
    }
}

/// Refuses commands of earlier connections.
const FENCE: &str = "if redis.call('GET', KEYS[1]) ~= ARGV[1] then return {'stale'} end\n";

/// Whether this process may write the session: no other owns the epoch or a later one.
const OWNER: &str = "
local held = redis.call('HMGET', KEYS[2], 'e', 'o', 'n')
local epoch = tonumber(ARGV[2])
if held[1] then
  if held[2] ~= ARGV[3] and tonumber(held[1]) >= epoch then return {'lost', held[3]} end
  if tonumber(held[1]) > epoch then epoch = tonumber(held[1]) end
end
";

/// Removes a flow's reference to an object; objects without any are collected.
const UNREFER: &str = "
local free = {}
local function unrefer(object, member)
  redis.call('SREM', ARGV[5] .. object, member)
  if redis.call('EXISTS', ARGV[5] .. object) == 0 then free[#free + 1] = object end
end
";

const NOW: &str = "
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
";

const LOOK_UP: &str = "
local all = redis.call('HGETALL', KEYS[1])
table.insert(all, 1, string.format('%.0f', now))
return all
";

// KEYS fence, session, ends; ARGV connection, epoch, process, node, member, how long it lasts
const CLAIM: &str = "
local held = redis.call('HMGET', KEYS[2], 'e', 'o', 'n', 'v')
local epoch = tonumber(ARGV[2])
local from = ''
if held[1] then
  local is_ours = held[2] == ARGV[3]
  if tonumber(held[1]) > epoch or (tonumber(held[1]) == epoch and not is_ours) then
    return {'lost', held[3], is_ours and '1' or ''}
  end
  if not is_ours then from = held[3] end
end
redis.call('HSET', KEYS[2], 'e', epoch, 'o', ARGV[3], 'n', ARGV[4])
redis.call('PERSIST', KEYS[2])
redis.call('ZADD', KEYS[3], 'GT', now + tonumber(ARGV[6]), ARGV[5])
return {'owned', tostring(tonumber(held[4] or '0')), from}
";

// KEYS fence, session, ends; ARGV connection, epoch, process, node, prefix of objects, member, what becomes of the
// record ('set', 'keep' or 'end'), the record, how long it lasts, how long its epoch is remembered after its end, then
// for each flow its id, 'set' or 'end', its memo, its object
const COMMIT: &str = "
if ARGV[7] == 'keep' and not ARGV[11] and not held[1] then return {'ok'} end
redis.call('HSET', KEYS[2], 'e', epoch, 'o', ARGV[3], 'n', ARGV[4])
if ARGV[7] ~= 'keep' or ARGV[11] then redis.call('HINCRBY', KEYS[2], 'v', 1) end
if ARGV[7] == 'end' then
  local all = redis.call('HKEYS', KEYS[2])
  for _, field in ipairs(all) do
    local kind = string.sub(field, 1, 1)
    if kind == 'x' then
      unrefer(redis.call('HGET', KEYS[2], field), ARGV[6] .. string.sub(field, 2))
    end
    if kind == 'x' or kind == 'm' then redis.call('HDEL', KEYS[2], field) end
  end
  redis.call('HDEL', KEYS[2], 'r', 't')
elseif ARGV[7] == 'set' then
  redis.call('HSET', KEYS[2], 'r', ARGV[8], 't', string.format('%.0f', now))
end
for i = 11, #ARGV, 4 do
  local flow = ARGV[i]
  local before = redis.call('HGET', KEYS[2], 'x' .. flow)
  if ARGV[i + 1] == 'set' then
    if before and before ~= ARGV[i + 3] then unrefer(before, ARGV[6] .. flow) end
    redis.call('HSET', KEYS[2], 'm' .. flow, ARGV[i + 2])
    if ARGV[i + 3] ~= '' then
      redis.call('HSET', KEYS[2], 'x' .. flow, ARGV[i + 3])
      redis.call('SADD', ARGV[5] .. ARGV[i + 3], ARGV[6] .. flow)
    end
  else
    if before then unrefer(before, ARGV[6] .. flow) end
    redis.call('HDEL', KEYS[2], 'm' .. flow, 'x' .. flow)
  end
end
if redis.call('HEXISTS', KEYS[2], 'r') == 1 then
  redis.call('PERSIST', KEYS[2])
  local ends = now + tonumber(ARGV[9])
  if ARGV[7] == 'set' then
    redis.call('ZADD', KEYS[3], ends, ARGV[6])
  else
    redis.call('ZADD', KEYS[3], 'GT', ends, ARGV[6])
  end
elseif ARGV[7] == 'end' then
  redis.call('PEXPIRE', KEYS[2], ARGV[10])
  redis.call('ZREM', KEYS[3], ARGV[6])
elseif redis.call('ZSCORE', KEYS[3], ARGV[6]) then
  redis.call('ZADD', KEYS[3], 'GT', now + tonumber(ARGV[9]), ARGV[6])
end
return {'ok', unpack(free)}
";

// KEYS none, ends; ARGV connection, prefix of sessions, how long an epoch is remembered after its session's record, how
// long without one, prefix of objects, how many
const SWEEP: &str = "
for _, member in ipairs(redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', now, 'LIMIT', 0, ARGV[6])) do
  local session = ARGV[2] .. member
  local all = redis.call('HGETALL', session)
  local remembered = ARGV[4]
  for i = 1, #all, 2 do
    local kind = string.sub(all[i], 1, 1)
    if kind == 'x' then
      unrefer(all[i + 1], member .. string.sub(all[i], 2))
    end
    if kind == 'r' then remembered = ARGV[3] end
    if kind == 'r' or kind == 't' or kind == 'm' or kind == 'x' then redis.call('HDEL', session, all[i]) end
  end
  redis.call('PEXPIRE', session, remembered)
  redis.call('ZREM', KEYS[2], member)
end
return {'ok', unpack(free)}
";

// KEYS fence, note; ARGV connection, 'is' or 'none', the expected value, 'set' or 'end', the value
const REPLACE_NOTE: &str = "
local held = redis.call('GET', KEYS[2])
local value = ARGV[4] == 'set' and ARGV[5] or false
if held ~= value then
  if ARGV[2] == 'is' and held ~= ARGV[3] or ARGV[2] == 'none' and held then return {'no'} end
end
if value then redis.call('SET', KEYS[2], value) else redis.call('DEL', KEYS[2]) end
return {'ok'}
";

// KEYS fence, object, held; ARGV connection, object, process
const HOLD: &str = "
redis.call('SADD', KEYS[2], 'h' .. ARGV[3])
redis.call('SADD', KEYS[3], ARGV[2])
return {'ok'}
";

// The same, and no other process holds it any more.
const HOLD_ALONE: &str = "
for _, member in ipairs(redis.call('SMEMBERS', KEYS[2])) do
  if #member ~= 48 then redis.call('SREM', KEYS[2], member) end
end
redis.call('SADD', KEYS[2], 'h' .. ARGV[3])
redis.call('SADD', KEYS[3], ARGV[2])
return {'ok'}
";

// As HOLD.
const LET_GO: &str = "
redis.call('SREM', KEYS[3], ARGV[2])
redis.call('SREM', KEYS[2], 'h' .. ARGV[3])
if redis.call('EXISTS', KEYS[2]) == 0 then return {'ok', ARGV[2]} end
return {'ok'}
";

// KEYS fence, processes of the node; ARGV connection, process, how long it is remembered
const CONNECT: &str = "
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[3])
redis.call('SADD', KEYS[2], ARGV[2])
return {'ok'}
";

// KEYS fence, lease of the node's name; ARGV connection, holder, how long it is believed
const LEASE: &str = "
local held = redis.call('GET', KEYS[2])
if held and held ~= ARGV[2] then return {'no'} end
redis.call('SET', KEYS[2], ARGV[2], 'PX', ARGV[3])
return {'ok'}
";

/// All scripts that run inside the store.
pub(crate) struct StoreScripts {
    pub(crate) look_up: StoreScript,
    pub(crate) claim: StoreScript,
    pub(crate) commit: StoreScript,
    /// A commit that only removes, which a full store takes.
    pub(crate) commit_removals: StoreScript,
    pub(crate) sweep: StoreScript,
    pub(crate) replace_note: StoreScript,
    pub(crate) remove_note: StoreScript,
    pub(crate) hold: StoreScript,
    pub(crate) hold_alone: StoreScript,
    pub(crate) let_go: StoreScript,
    pub(crate) lease: StoreScript,
    /// The script `lease` without leave to run in a full store: its answer tells whether there is room.
    pub(crate) lease_with_room: StoreScript,
    pub(crate) connect: StoreScript,
}

/// All scripts, compiled once.
pub(crate) static SCRIPTS: LazyLock<StoreScripts> = LazyLock::new(|| {
    use ScriptEffect::{NeedsNoRoom, Reads, Writes};
    let commit = [FENCE, OWNER, UNREFER, NOW, COMMIT].concat();
    let note = [FENCE, REPLACE_NOTE].concat();
    StoreScripts {
        look_up: StoreScript::new(Reads, &[NOW, LOOK_UP].concat()),
        claim: StoreScript::new(Writes, &[FENCE, NOW, CLAIM].concat()),
        commit: StoreScript::new(Writes, &commit),
        commit_removals: StoreScript::new(NeedsNoRoom, &commit),
        sweep: StoreScript::new(NeedsNoRoom, &[FENCE, UNREFER, NOW, SWEEP].concat()),
        replace_note: StoreScript::new(Writes, &note),
        remove_note: StoreScript::new(NeedsNoRoom, &note),
        hold: StoreScript::new(Writes, &[FENCE, HOLD].concat()),
        hold_alone: StoreScript::new(Writes, &[FENCE, HOLD_ALONE].concat()),
        let_go: StoreScript::new(NeedsNoRoom, &[FENCE, LET_GO].concat()),
        lease: StoreScript::new(NeedsNoRoom, &[FENCE, LEASE].concat()),
        lease_with_room: StoreScript::new(Writes, &[FENCE, LEASE].concat()),
        connect: StoreScript::new(NeedsNoRoom, CONNECT),
    }
});

impl StoreScripts {
    pub(crate) fn all(&self) -> [&StoreScript; 13] {
        [
            &self.look_up,
            &self.claim,
            &self.commit,
            &self.commit_removals,
            &self.sweep,
            &self.replace_note,
            &self.remove_note,
            &self.hold,
            &self.hold_alone,
            &self.let_go,
            &self.lease,
            &self.lease_with_room,
            &self.connect,
        ]
    }
}
