// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package explain

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
)

// Limits that keep the line within an event's message (1,024 bytes) with room for the scheduler's own words.
const (
	maxExplanation = 800
	maxQuoted      = 80
	maxNamed       = 3 // alternatives of one request, and claims of one node, that are named
)

// String is the explanation in one line for a person, of at most 800 bytes: what a user can change about the
// claim, then whose release would help, then what is wrong in the cluster. It is empty if there is no failure.
func (e *Explanation) String() string {
	if e.Nodes == 0 {
		return ""
	}
	facts := e.describeRequests()
	for _, c := range e.Constraints {
		facts = append(facts, fmt.Sprintf("at most %d free devices of one node share %s (claim %s wants %d)",
			c.Best, clip(string(c.Attribute), maxQuoted), clip(c.Claim, maxQuoted), c.Wanted))
	}
	switch n := e.Reasons[ReasonConstraints]; {
	case e.NeverTogether:
		facts = append(facts, "no node could satisfy the pod's requests together, even if all its devices were free")
	case n > 0 && len(e.Constraints) == 0:
		facts = append(facts, fmt.Sprintf("%d node(s) have free devices for each request, but not for all together", n))
	}
	if n := e.Reasons[ReasonTooMany]; n > 0 {
		facts = append(facts, fmt.Sprintf("on %d node(s) the claim would get more than %d devices", n, resourceapi.AllocationResultsMaxSize))
	}
	// The way out must not be what is cut off.
	release := ""
	if len(e.Holders) > 0 {
		release = "; " + e.Holders[0].String()
	}
	text := clip(strings.Join(facts, "; "), maxExplanation-len(release)) + release
	for _, fact := range e.troubles() {
		text += "; " + fact
	}
	return clip(strings.TrimPrefix(text, "; "), maxExplanation)
}

// describeRequests describes all requests; of those with many alternatives the first that match anything, then
// others.
func (e *Explanation) describeRequests() []string {
	var facts []string
	for rest := e.Requests; len(rest) > 0; {
		alternatives := rest[:1]
		for len(alternatives) < len(rest) && rest[len(alternatives)].isAlternativeOf(&rest[0]) {
			alternatives = rest[:len(alternatives)+1]
		}
		rest = rest[len(alternatives):]
		alternatives = slices.Clone(alternatives)
		slices.SortStableFunc(alternatives, func(a, b Request) int {
			return cmp.Compare(min(b.Matching, 1), min(a.Matching, 1))
		})
		for i := range alternatives[:min(maxNamed, len(alternatives))] {
			facts = append(facts, alternatives[i].String())
		}
		if n := len(alternatives) - maxNamed; n > 0 {
			facts[len(facts)-1] += more(n, "alternative")
		}
	}
	return facts
}

// isAlternativeOf tells whether both are alternatives of one request. Names of requests have no slash.
func (r *Request) isAlternativeOf(o *Request) bool {
	name, _, prioritized := strings.Cut(r.Request, "/")
	other, _, _ := strings.Cut(o.Request, "/")
	return prioritized && name == other && r.Claim == o.Claim
}

// troubles are what is wrong in the cluster.
func (e *Explanation) troubles() []string {
	var facts []string
	if len(e.SelectorErrors) > 0 {
		facts = append(facts, clip(e.SelectorErrors[0].String(), 5*maxQuoted)+more(e.failedExpressions()-1, "expression"))
	}
	if len(e.Pools) > 0 {
		facts = append(facts, clip(e.Pools[0].String(), 2*maxQuoted)+more(len(e.Pools)-1, "pool"))
	}
	if n := e.Reasons[ReasonUndecided]; n > 0 {
		facts = append(facts, fmt.Sprintf("%d node(s) undecided: timed out while searching for devices", n))
	}
	return facts
}

// failedExpressions counts the expressions that failed. On how many devices is what requests say.
func (e *Explanation) failedExpressions() int {
	different := map[string]struct{}{}
	for i := range e.SelectorErrors {
		different[e.SelectorErrors[i].expression()] = struct{}{}
	}
	return len(different)
}

// who names a request as its user knows it.
func who(subject, request, claim string) string {
	if subject != "" {
		return clip(subject, 2*maxQuoted)
	}
	return fmt.Sprintf("request %q of claim %s", clip(request, 2*maxQuoted), clip(claim, maxQuoted))
}

// String says how the devices look to the request, such as
//
//	request "gpu" of claim train: 72 of 80 gpu.nvidia.com devices held, 6 filtered by selector "memory>=80Gi", 2 tainted gpu-lost
//
// or, if no node could satisfy it whoever releases devices, only that.
func (r *Request) String() string {
	text := who(r.Subject, r.Request, r.Claim) + ": "
	class := clip(r.DeviceClass, maxQuoted)
	switch {
	case r.Offered <= 0:
		return text + "no ResourceSlice offers devices to the nodes"
	case r.Devices <= 0:
		return text + fmt.Sprintf("0 of %d devices match class %s's selectors", r.Offered, class)
	}
	if r.Limit != nil {
		if limit := r.Limit.describe(class, len(r.FilteredBy) > 0); limit != "" {
			return text + limit
		}
	}
	var facts []string
	fact := func(n int, what string) {
		switch {
		case n <= 0:
		case len(facts) == 0:
			facts = append(facts, fmt.Sprintf("%d of %d %s devices %s", n, r.Devices, class, what))
		default:
			facts = append(facts, fmt.Sprintf("%d %s", n, what))
		}
	}
	fact(r.Held-r.Foreign, "held")
	fact(r.Foreign, "shared by another namespace")
	fact(r.Full, "shared by others, with too little capacity left")
	fact(r.Exhausted-r.Full, "blocked by devices in use that take from the same shared counters")
	fact(r.Incompatible, "incompatible with devices in use beside them (compatibilityGroups)")
	for _, f := range r.FilteredBy {
		fact(f.Devices, "filtered by selector "+quote(clip(f.Expression, maxQuoted)))
	}
	fact(r.TooSmall, "with less capacity than requested")
	for _, key := range slices.Sorted(maps.Keys(r.Taints)) {
		fact(r.Taints[key], "tainted "+clip(key, maxQuoted))
	}
	fact(r.NodeAllocatable,
		"standing for CPU or memory of a node (nodeAllocatableResources), which only kube-scheduler itself can account for")
	fact(r.Skipping, "needing node operations to be skipped (skipNodeOperations), which is not enabled or the node does not declare")
	fact(r.Unsupported-r.NodeAllocatable-r.Skipping, "with features that are not supported")
	fact(r.Failing, "failing a selector")
	if r.All {
		fact(r.Free, "free (all of a node wanted)")
	} else {
		fact(r.Free, fmt.Sprintf("free (%d wanted on one node)", r.Wanted))
	}
	return text + strings.Join(facts, ", ")
}

// describe says what is asked for and what there is, such as "asks for 9 gpu.example.com devices of one node, the largest has 8". It is
// empty if there is nothing of it: then it is the other counts that say why.
func (l *Limit) describe(class string, selected bool) string {
	capacity := clip(string(l.Capacity), maxQuoted)
	text := ""
	switch {
	case l.Capacity != "" && l.LargestCapacity == "0":
		return fmt.Sprintf("asks for %s %s, and no %s device has any", l.AskedCapacity, capacity, class)
	case l.Capacity != "":
		return fmt.Sprintf("asks for %s %s, the largest %s device has %s", l.AskedCapacity, capacity, class, l.LargestCapacity)
	case l.Devices == 0:
		return ""
	case l.Others > 0:
		text = fmt.Sprintf("with %d more %s of the pod asks for %d %s devices of one node, the largest has %d",
			l.Others, plural(l.Others, "request"), l.Asked, class, l.Devices)
	default:
		text = fmt.Sprintf("asks for %d %s devices of one node, the largest has %d", l.Asked, class, l.Devices)
	}
	if selected {
		text += " that match its selectors"
	}
	return text
}

// String says the same as SelectorError.
func (e *SelectorError) String() string {
	of := fmt.Sprintf("claim %s/%s, request %q", e.Namespace, e.Claim, e.Request)
	if e.Subject != "" {
		of = e.Subject
	}
	return fmt.Sprintf("%s: %s failed, for example on device %s/%s/%s: %s", of, e.expression(), e.Driver, e.Pool, e.Device, e.Message)
}

// expression says what failed.
func (e *SelectorError) expression() string {
	switch {
	case e.Attribute != "":
		return fmt.Sprintf("derived attribute %s (%s)", e.Attribute, quote(e.Expression))
	case e.Expression == "":
		return "the comparison of the requested capacity"
	case e.DeviceClass != "":
		return fmt.Sprintf("selector %s of device class %q", quote(e.Expression), e.DeviceClass)
	}
	return "selector " + quote(e.Expression)
}

// String names the pool and what is wrong with it.
func (p *Pool) String() string {
	return fmt.Sprintf("pool %s/%s is %s: %s", p.Driver, p.Pool, p.Kind, p.Detail)
}

// InNamespace returns the explanation for who may read one namespace only: of claims of others it has the number.
func (e *Explanation) InNamespace(namespace string) *Explanation {
	out := *e
	out.Holders = make([]NodeHolders, len(e.Holders))
	for i := range e.Holders {
		out.Holders[i] = NodeHolders{
			Node:    e.Holders[i].Node,
			Release: anonymous(e.Holders[i].Release, namespace),
			Holders: anonymous(e.Holders[i].Holders, namespace),
		}
	}
	return &out
}

// anonymous takes the names from claims of other namespaces, which come last.
func anonymous(claims []ClaimHolder, namespace string) []ClaimHolder {
	var named, unnamed []ClaimHolder
	for i := range claims {
		if claims[i].Namespace == namespace {
			named = append(named, claims[i])
		} else {
			unnamed = append(unnamed, ClaimHolder{InFlight: claims[i].InFlight, Devices: claims[i].Devices})
		}
	}
	return append(named, unnamed...)
}

// String says which claims are in the way, such as "would fit on node n1 if claims default/a, default/b were released".
func (h *NodeHolders) String() string {
	names := make([]string, 0, len(h.Release))
	foreign := 0
	for _, claim := range h.Release {
		if claim.Claim == "" {
			foreign++
			continue
		}
		names = append(names, clip(claim.Namespace+"/"+claim.Claim, maxQuoted))
	}
	return fmt.Sprintf("would fit on node %s if %s were released", clip(h.Node, maxQuoted), ListClaims(names, foreign))
}

// ListClaims lists claims, at most three of them by name, and counts those of other namespaces. There is at least one.
func ListClaims(names []string, foreign int) string {
	text := ""
	if n := len(names); n > 0 {
		text = plural(n, "claim") + " " + strings.Join(names[:min(maxNamed, n)], ", ")
		if n > maxNamed {
			text += fmt.Sprintf(" and %d more", n-maxNamed)
		}
		if foreign == 0 {
			return text
		}
		text += " and "
	}
	return text + fmt.Sprintf("%d %s of other namespaces", foreign, plural(foreign, "claim"))
}

func plural(n int, what string) string {
	if n == 1 {
		return what
	}
	return what + "s"
}

// quote puts text into quotes that it does not contain, if there are any, so that it can be read and copied.
func quote(text string) string {
	for _, q := range []string{`"`, "'", "`"} {
		if !strings.Contains(text, q) {
			return q + text + q
		}
	}
	return strconv.Quote(text)
}

func more(n int, what string) string {
	if n <= 0 {
		return ""
	}
	return fmt.Sprintf(" (and %d more %s)", n, plural(n, what))
}

// clip shortens text to at most limit bytes, at a rune's border and without line breaks.
func clip(text string, limit int) string {
	text = strings.Join(strings.Fields(strings.ToValidUTF8(text, "?")), " ")
	if len(text) <= limit {
		return text
	}
	const ellipsis = "…"
	cut := limit - len(ellipsis)
	for cut > 0 && text[cut]&0xC0 == 0x80 {
		cut--
	}
	return text[:cut] + ellipsis
}
