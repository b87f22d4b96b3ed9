package steps

import (
	"context"
	"testing"
	"time"

	"stowage.dev/stowage/pkg/agent/ledger"
	"stowage.dev/stowage/pkg/agent/sharing"
)

// started notes for whom daemons are started.
type started struct {
	sharing.Daemons
	multiUser []sharing.MultiUser
}

func (s *started) Start(_ context.Context, daemon sharing.Daemon) error {
	s.multiUser = append(s.multiUser, daemon.MultiUser)
	return nil
}

// TestADaemonOfAnOlderAgentServesSeveralUsers, if it is one of shares: after a reboot it is started by the record.
func TestADaemonOfAnOlderAgentServesSeveralUsers(t *testing.T) {
	for name, tc := range map[string]struct {
		recorded sharing.MultiUser
		shared   bool
		want     sharing.MultiUser
	}{
		"a claim's, recorded before there was a choice": {want: sharing.MultiUserNo},
		"shares', recorded before there was a choice":   {shared: true, want: sharing.MultiUserIfPossible},
		"a claim's":                  {recorded: sharing.MultiUserYes, want: sharing.MultiUserYes},
		"shares'":                    {recorded: sharing.MultiUserIfPossible, shared: true, want: sharing.MultiUserIfPossible},
		"shares', asked for by name": {recorded: sharing.MultiUserYes, shared: true, want: sharing.MultiUserYes},
	} {
		t.Run(name, func(t *testing.T) {
			tool := &started{}
			step := ledger.Step{Kind: ledger.StepMPSDaemon, Shared: tc.shared, Daemon: &ledger.Daemon{MultiUser: string(tc.recorded)}}
			if err := (Daemons{Tool: tool, Timeout: time.Minute}).Start(t.Context(), step); err != nil {
				t.Fatal(err)
			}
			if len(tool.multiUser) != 1 || tool.multiUser[0] != tc.want {
				t.Errorf("started for %q, want %q", tool.multiUser, tc.want)
			}
		})
	}
}
