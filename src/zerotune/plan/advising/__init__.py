"""Which plan fits: candidates in order of preference, costed and compared with what there is."""
