package allocator

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
	for i := range r.claims {
		claim := &r.claims[i]
		number(len(claim.requests))
		for _, request := range claim.requests {
			flag(request.prioritized)
			number(len(request.alternatives))
			for _, a := range request.alternatives {
				number(int(a.matcher.ID()))
				flag(a.all)
				number(a.count)
				flag(a.admin)
				number(len(a.derived))
				for _, d := range a.derived {
					text(string(d.name))
					text(d.from.Expression())
				}
			}
		}
		number(len(claim.constraints))
		for _, c := range claim.constraints {
			flag(c.distinct)
			text(string(c.attribute))
			for _, request := range claim.requests {
				for _, a := range request.alternatives {
					flag(slices.Contains(a.constraints, c))
				}
			}
		}
	}
	return string(b)
}
