package main

import (
	"testing"

	"github.com/spf13/pflag"
)

// TestDaemonsAreInTheSandboxUnlessAnAdministratorSaysSo: the other flags for them have no say in it.
func TestDaemonsAreInTheSandboxUnlessAnAdministratorSaysSo(t *testing.T) {
	for name, tc := range map[string]struct {
		args       []string
		unconfined bool
	}{
		"nothing said": {},
		"other flags":  {args: []string{"--mps-root=/run/mps", "--mps-shm-size=1Gi"}},
		"as it is":     {args: []string{"--mps-sandbox"}},
		"without":      {args: []string{"--mps-sandbox=false"}, unconfined: true},
	} {
		t.Run(name, func(t *testing.T) {
			opts := defaultOptions(func(string) (string, bool) { return "", false }, func() (string, error) { return "node-1", nil })
			flags := pflag.NewFlagSet("run", pflag.ContinueOnError)
			opts.addRunFlags(flags)
			if err := flags.Parse(tc.args); err != nil {
				t.Fatal(err)
			}
			daemons, err := opts.daemons()
			if err != nil || daemons.Unconfined != tc.unconfined {
				t.Errorf("unconfined %t, %v; want %t", daemons.Unconfined, err, tc.unconfined)
			}
		})
	}
}
