//! The heap of the process: how many parts the C library divides it into, and free memory that it keeps.
//!
//! glibc makes an arena for threads that allocate at the same time, up to eight for each core, and memory that is freed
//! within an arena stays there. Free memory at the end of the heap goes back to the system from 128 KiB on, and the next
//! allocation takes it again, page fault by page fault. Other C libraries have nothing of the sort: with them these calls do
//! nothing.

/// How much free memory at the end of the heap stays with the process, after [`keep_free_heap`]: less than this costs
/// throughput by chance, more does not raise it (docs/benchmarks.md, "Free memory at the end of the heap").
#[cfg(target_env = "gnu")]
const FREE_HEAP_BYTES: libc::c_int = 8 << 20;

/// Sets how many arenas glibc makes at most. To be called before the process has threads: an arena that exists stays.
///
/// Fewer arenas keep less free memory; with too few of them threads wait for each other.
pub fn limit_heap_arenas(max: u8) {
    #[cfg(target_env = "gnu")]
    {
        // SAFETY: it takes two numbers, and sets a bound that the allocator reads when it makes an arena (mallopt(3)).
        // Without threads nothing reads it at the same time.
        // If it is refused there are more arenas, and nothing else.
        let _ = unsafe { libc::mallopt(libc::M_ARENA_MAX, max.into()) };
    }
    #[cfg(not(target_env = "gnu"))]
    let _ = max;
}

/// Keeps up to 8 MiB of free memory at the end of the heap, instead of 128 KiB. To be called before much is allocated.
///
/// What a connection receives is freed as the program reads it. Blocks that lie at the end of the heap, which is chance,
/// would otherwise go back to the system and be taken again a hundred times for each that is needed.
pub fn keep_free_heap() {
    #[cfg(target_env = "gnu")]
    {
        // SAFETY: it takes two numbers, and sets a bound that the allocator reads when memory is freed (mallopt(3)).
        // If it is refused, memory goes back earlier, and nothing else.
        let _ = unsafe { libc::mallopt(libc::M_TRIM_THRESHOLD, FREE_HEAP_BYTES) };
    }
}

/// Gives free memory of the heap back to the system, as far as it fills pages. Blocks, with much memory for some tenths
/// of a second, in which threads that allocate may wait.
pub fn release_free_heap() {
    #[cfg(target_env = "gnu")]
    // SAFETY: it takes a number, may be called by any thread (malloc_trim(3)), and touches free memory alone.
    unsafe {
        libc::malloc_trim(0);
    }
}

#[cfg(all(test, target_env = "gnu"))]
mod tests {
    use std::sync::{Mutex, PoisonError};

    use super::*;

    /// Held by the test that measures the memory of the process.
    static ALONE: Mutex<()> = Mutex::new(());

    /// Resident bytes of this process that no file is behind.
    fn resident() -> u64 {
        let status = std::fs::read_to_string("/proc/self/status").expect("readable");
        let line = status
            .lines()
            .find_map(|line| line.strip_prefix("RssAnon:"));
        let kib = line.and_then(|rest| rest.split_whitespace().next()?.parse::<u64>().ok());
        kib.expect("a number") * 1024
    }

    #[test]
    fn free_memory_below_memory_in_use_is_given_back() {
        let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        const BLOCK: usize = 4 << 10;
        const BLOCKS: usize = 8 << 10;
        let mut blocks: Vec<Vec<u8>> = (0..BLOCKS).map(|n| vec![n as u8; BLOCK]).collect();
        // Above all others: without it the heap would shrink by itself.
        let last = blocks.pop().expect("there are many");
        let full = resident();
        drop(blocks);
        release_free_heap();
        let after = resident();
        assert_eq!(last.len(), BLOCK);
        let given_back = full.saturating_sub(after);
        assert!(given_back > 16 << 20, "{given_back} of 32 MiB");
    }

    #[test]
    fn free_memory_at_the_end_of_the_heap_stays_with_the_process() {
        let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        keep_free_heap();
        const BLOCK: usize = 16 << 10;
        const BLOCKS: usize = 256;
        let before = resident();
        let blocks: Vec<Vec<u8>> = (0..BLOCKS).map(|n| vec![n as u8; BLOCK]).collect();
        drop(blocks);
        let kept = resident().saturating_sub(before);
        assert!(kept > 3 << 20, "{kept} of 4 MiB");
    }
}
