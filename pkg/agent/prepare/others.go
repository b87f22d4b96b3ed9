package prepare

import (
	"errors"
	"fmt"
	"strings"

	"stowage.dev/stowage/pkg/agent/ledger"
)

// What keeps a claim from being prepared is told to its namespace: in the claim's conditions, in events of its pods, and in the kubelet's. It
// names claims and pods of that namespace; of others no more than that there are some. The log names them all; see Others.

// named names the others to the namespace of the claim.
func named(to ledger.Claim, others ...ledger.Claim) string {
	var own []string
	foreign := 0
	for _, other := range others {
		if other.Namespace == to.Namespace {
			own = append(own, other.String())
		} else {
			foreign++
		}
	}
	var parts []string
	switch len(own) {
	case 0:
	case 1:
		parts = append(parts, "claim "+own[0])
	default:
		parts = append(parts, "claims "+strings.Join(own, ", "))
	}
	switch foreign {
	case 0:
	case 1:
		parts = append(parts, "a claim of another namespace")
	default:
		parts = append(parts, fmt.Sprintf("%d claims of other namespaces", foreign))
	}
	return strings.Join(parts, " and ")
}

// toldTo is what the namespace of a claim may know of those who use another one.
func (u Use) toldTo(to, of ledger.Claim) string {
	if of.Namespace != to.Namespace {
		return u.Public
	}
	return u.Text
}

// Others names, for the log, the claims and pods that an error is about besides its own, and what is known of them. An error's text is for the
// claim's namespace, and names no others'.
func Others(err error) []string {
	var (
		held        *HeldError
		share       *ShareError
		quarantined *QuarantinedError
		busy        *BusyError
		names       []string
	)
	add := func(claim ledger.Claim, use Use) {
		if claim.Name == "" {
			return
		}
		name := claim.String()
		if use.Text != "" {
			name += ", " + use.Text
		}
		names = append(names, name)
	}
	switch {
	case errors.As(err, &held) && held.Unreadable != nil:
		names = append(names, fmt.Sprintf("%s: %v", held.Holder.UID, held.Unreadable))
	case errors.As(err, &held):
		add(held.Holder, held.Use)
	case errors.As(err, &share):
		for _, other := range share.Others {
			var use Use
			if other == share.Holder {
				use = share.Use
			}
			add(other, use)
		}
	case errors.As(err, &quarantined):
		add(quarantined.Owed, Use{})
		names = append(names, quarantined.inFull())
	case errors.As(err, &busy):
		names = append(names, fmt.Sprintf("process %d of pod %s", busy.PID, busy.Pod))
	}
	return names
}
