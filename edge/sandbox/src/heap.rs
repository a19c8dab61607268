//! The heap of the process: how many parts the C library divides it into, and free memory that it keeps.
//!
//! glibc makes an arena for threads that allocate at the same time, up to eight for each core, and memory that is freed
//! within an arena stays there. Other C libraries have nothing of the sort: with them both calls do nothing.

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
    use super::*;

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
}
