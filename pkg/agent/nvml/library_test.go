package nvml

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	gonvml "github.com/NVIDIA/go-nvml/pkg/nvml"
	"sigs.k8s.io/yaml"

	"stowage.dev/stowage/pkg/nvmlsim"
	"stowage.dev/stowage/pkg/nvmlsim/librarytest"
)

func TestMain(m *testing.M) { os.Exit(librarytest.Main(m)) }

// libraryVariable names a simulated libnvidia-ml.so.1. The tests of this package
// then see simulated GPUs through it, as the agent sees real ones.
const libraryVariable = "STOWAGE_TEST_NVML_LIBRARY"

const seenThrough = "the machine is seen through the C library"

// seen is a machine of that profile, and the narrow view of it: within this
// process, or through the C library, which has the machine's folder.
func seen(t *testing.T, p *nvmlsim.Profile) (*nvmlsim.Machine, Library) {
	t.Helper()
	path := os.Getenv(libraryVariable)
	if path == "" {
		m := nvmlsim.NewMachine(p, "node-a")
		return m, Adapt(m.NVML(), "sim:"+p.Name)
	}
	t.Log(seenThrough)
	folder := t.TempDir()
	if err := os.Chmod(folder, 0o700); err != nil {
		t.Fatal(err)
	}
	m, err := nvmlsim.OpenMachine(p, "node-a", folder)
	if err != nil {
		t.Fatal(err)
	}
	// The profile may be a changed one.
	content, err := yaml.Marshal(p)
	if err != nil {
		t.Fatal(err)
	}
	t.Setenv("NVMLSIM_PROFILE", writeFile(t, folder, "profile.yaml", string(content)))
	t.Setenv("NVMLSIM_SOCKET", filepath.Join(folder, nvmlsim.ControlSocket))
	return m, adaptReal(gonvml.New(gonvml.WithLibraryPath(path)), path)
}

// What the agent reads, sets, makes and waits for through the C library is the same as within the process.
func TestTheCLibraryAnswersAsTheSimulationDoes(t *testing.T) {
	if os.Getenv(libraryVariable) != "" {
		t.Skip("this is the run through the C library")
	}
	tests := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^Test", "-test.v", "-test.timeout=5m")
	tests.Env = append(os.Environ(), libraryVariable+"="+librarytest.Build(t))
	out, err := tests.CombinedOutput()
	if through := strings.Count(string(out), seenThrough); err != nil || through < 30 {
		t.Errorf("%v; %d machines were seen through the C library, want 30 or more:\n%s", err, through, out)
	}
}
