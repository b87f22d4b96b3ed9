// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package compiled

import (
	"encoding/binary"
	"slices"
)

// description has all of the requests on which the result of Check depends, but for names: pods that were made from one
// template have equal ones, and what was found for one of them is true for all. Features are in the matchers.
func (r *Requests) description() string {
	var b []byte
	number := func(n int) { b = binary.AppendVarint(b, int64(n)) }
	flag := func(is bool) {
		if is {
			b = append(b, 1)
		} else {
			b = append(b, 0)
		}
	}
	text := func(t string) {
		number(len(t))
		b = append(b, t...)
	}
	for i := range r.Claims {
		claim := &r.Claims[i]
		number(len(claim.Requests))
		for _, request := range claim.Requests {
			flag(request.Prioritized)
			number(len(request.Alternatives))
			for _, a := range request.Alternatives {
				number(int(a.Matcher.ID()))
				flag(a.All)
				number(a.Count)
				flag(a.Admin)
				number(len(a.derived))
				for _, d := range a.derived {
					text(string(d.name))
					text(d.from.Expression())
				}
			}
		}
		number(len(claim.Constraints))
		for _, c := range claim.Constraints {
			flag(c.Distinct)
			text(string(c.Attribute))
			for _, request := range claim.Requests {
				for _, a := range request.Alternatives {
					flag(slices.Contains(a.Constraints, c))
				}
			}
		}
	}
	return string(b)
}
