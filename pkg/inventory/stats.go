// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package inventory

// CacheStats describes a bounded cache.
type CacheStats struct {
	Entries, Limit int
	// Evicted counts entries that had to make room, or for which there was none.
	Evicted uint64
}

// Stats describes the caches of a store.
type Stats struct {
	// Selectors and Derivations are compiled CEL expressions, Matchers what requests accept, and Numbers the texts of View.NumberOf.
	Selectors, Matchers, Derivations, Numbers CacheStats
	// Parts are what different nodes see of a pool, and Columns the attributes of what they see. These caches are as many as there are
	// pools and parts: Entries are those of the fullest one, and Evicted of all.
	Parts, Columns CacheStats
}

// Stats returns how full the caches are. It looks at every pool.
func (s *Store) Stats() Stats {
	view := s.View()
	c := view.caches
	stats := Stats{
		Selectors: c.expressions.stats(), Matchers: c.matchers.stats(), Derivations: c.derivations.stats(), Numbers: c.numbers.stats(),
		Parts:   CacheStats{Limit: maxParts, Evicted: c.lostParts.Load()},
		Columns: CacheStats{Limit: maxColumns, Evicted: c.lostColumns.Load()},
	}
	for pool := range view.Pools() {
		for _, generation := range append([]*Pool{pool}, pool.outdated.all...) {
			parts, columns := generation.cached()
			stats.Parts.Entries = max(stats.Parts.Entries, parts)
			stats.Columns.Entries = max(stats.Columns.Entries, columns)
		}
	}
	return stats
}

// cached is how many parts of the pool are kept, and of how many attributes at most.
func (p *Pool) cached() (parts, columns int) {
	p.mu.RLock()
	defer p.mu.RUnlock()
	for _, part := range p.parts {
		if part.pool != nil {
			columns = max(columns, part.pool.columns.len())
		}
	}
	return len(p.parts), columns
}
