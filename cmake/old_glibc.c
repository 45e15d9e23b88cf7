/* What libstdc++ reads and a glibc before 2.32 does not have: whether the process has one thread. It only spares atomic
   operations, so "no" is always right. */
char __libc_single_threaded __attribute__((visibility("hidden"))) = 0;
