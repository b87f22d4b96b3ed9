package deviceplugin

import (
	"context"
	"os"
	"path/filepath"
	"testing"
	"time"

	"k8s.io/klog/v2/ktesting"
)

// A plugin that cannot register makes a socket for each try, and removes it. Were it told of that, it would try again at once, and for ever.
func TestAPluginThatCannotRegisterIsNotToldOfItsOwnSockets(t *testing.T) {
	_, ctx := ktesting.NewTestContext(t)
	ctx, cancel := context.WithCancel(ctx)
	s := New(Options{Dir: t.TempDir()})
	first, second := s.toldOfEvents(), s.toldOfEvents()
	done := make(chan struct{})
	go func() { defer close(done); s.watch(ctx) }()
	defer func() { cancel(); <-done }()
	await := func(what string, c <-chan struct{}) {
		t.Helper()
		select {
		case <-c:
		case <-time.After(time.Minute):
			t.Fatalf("not told within a minute: %s", what)
		}
	}
	// Until the folder is watched, an event may be missed.
	for n, told := 0, false; !told; n++ {
		if err := os.WriteFile(filepath.Join(s.opts.Dir, "stowage-gpu-1.sock"), make([]byte, n), 0o600); err != nil {
			t.Fatal(err)
		}
		select {
		case <-first.any:
			told = true
		case <-time.After(time.Millisecond):
		}
	}
	await("the second plugin, of the first one's socket", second.any)
	for _, e := range []events{first, second} {
		select {
		case <-e.kubelet:
			t.Error("told of the kubelet, and it was a plugin's socket")
		default:
		}
	}
	if err := os.WriteFile(filepath.Join(s.opts.Dir, "kubelet.sock"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	await("the first plugin, of the kubelet's socket", first.kubelet)
	await("the second plugin, of the kubelet's socket", second.kubelet)
}
