// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package inventory

import (
	"iter"

	v1 "k8s.io/api/core/v1"
)

// Reach says which nodes may use devices of the pool, or would if the pool were usable. If local is true these are the
// nodes of that name, some perhaps more than once; there need not be such nodes. Otherwise it depends on each node, see
// Reaches, and names are to be ignored.
func (p *Pool) Reach() (names iter.Seq[string], local bool) {
	return p.nodeNames(), p.local
}

// Reaches tells whether the node sees anything of the pool, be it usable or not.
func (p *Pool) Reaches(node *v1.Node) bool { return p.forNode(node) != nil }
