package modelstore

import (
	"strings"
	"testing"
)

const sum = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"

func TestParseManifest(t *testing.T) {
	json := `{"name":"llama-3","version":"1.0+q4","engine":"llamacpp","main":"b.gguf","config":{"contextLength":4096,"maxNumSeqs":8},
		"files":[{"path":"a/b.txt","size":0,"sha256":"` + sum + `"},{"path":"b.gguf","size":7,"sha256":"` + strings.ToUpper(sum) + `","url":"x/y"}]}`
	yaml := "name: llama-3\nversion: 1.0+q4\nengine: llamacpp\nmain: b.gguf\nconfig: {contextLength: 4096, maxNumSeqs: 8}\nfiles:\n" +
		"- {path: a/b.txt, size: 0, sha256: " + sum + "}\n- {path: b.gguf, size: 7, sha256: " + sum + ", url: x/y}\n"
	for _, text := range []string{json, yaml} {
		m, err := ParseManifest([]byte(text))
		if err != nil {
			t.Fatal(err)
		}
		if m.Ref().String() != "llama-3@1.0+q4" || m.Bytes() != 7 || m.Config.ContextLength != 4096 || m.Config.MaxNumSeqs != 8 || m.Files[1].SHA256 != sum {
			t.Errorf("%+v", m)
		}
	}
	m, err := ParseManifest([]byte("name: a\nversion: v1\nfiles: [{path: x, size: 1, sha256: " + sum + "}]"))
	if err != nil || m.Main != "x" {
		t.Errorf("main %q, %v", m.Main, err)
	}
}

func TestManifestMistakes(t *testing.T) {
	file := func(path string) string { return "{path: '" + path + "', size: 1, sha256: " + sum + "}" }
	of := func(files ...string) string {
		return "name: a\nversion: v1\nfiles: [" + strings.Join(files, ", ") + "]\n"
	}
	for text, want := range map[string]string{
		"": "manifest", "[]": "manifest", "name: [": "manifest",
		"name: a\nversion: v1\nfiles: []":                                 "0 files",
		strings.Replace(of(file("x")), "name: a", "name: ../a", 1):        "name",
		strings.Replace(of(file("x")), "name: a", "name: .a", 1):          "name",
		strings.Replace(of(file("x")), "version: v1", "version: ''", 1):   "version",
		strings.Replace(of(file("x")), "name: a", "nam: a", 1):            "nam",
		of(file("x")) + "main: y":                                         "main",
		of(file("x")) + "config: {threads: -1}":                           "negative",
		of(file("x")) + "---\nname: b":                                    "behind",
		of(file("x"), file("X")):                                          "twice",
		of(file("x"), file("x/y")):                                        "folder",
		of(file("../x")):                                                  "inside",
		of(file("/etc/passwd")):                                           "inside",
		of(file("a/../x")):                                                "inside",
		of(file("a\\x")):                                                  "inside",
		of(file("c:x")):                                                   "inside",
		of(file(".")):                                                     "inside",
		of(file("")):                                                      "inside",
		of(file("manifest.json")):                                         "store uses",
		of(file("Manifest.JSON")):                                         "store uses",
		of(file("x.part")):                                                "store uses",
		of("{path: x, size: -1, sha256: " + sum + "}"):                    "size",
		of("{path: x, size: 1, sha256: abc}"):                             "sha256",
		of("{path: x, size: 1, sha256: " + strings.Repeat("z", 64) + "}"): "sha256",
		strings.Repeat("#", maxManifest+1):                                "at most",
	} {
		if _, err := ParseManifest([]byte(text)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%.60q: %v, want %s", text, err, want)
		}
	}
}

func TestParseRef(t *testing.T) {
	if r, err := ParseRef("a.b@v1"); err != nil || r != (Ref{"a.b", "v1"}) {
		t.Errorf("%v, %v", r, err)
	}
	for _, bad := range []string{"", "a", "a@", "@v", "a@b@c", "a/b@v", "..@v", "a@.."} {
		if _, err := ParseRef(bad); err == nil {
			t.Errorf("%q was taken", bad)
		}
	}
}

func TestBeside(t *testing.T) {
	for _, c := range []struct{ manifest, path, url, want string }{
		{"/m/manifest.yaml", "a/b c.gguf", "", "/m/a/b c.gguf"},
		{"m.json", "x", "", "x"},
		{"file:///m/m.json", "x", "", "/m/x"},
		{"/m/m.json", "x", "/elsewhere/x", "/elsewhere/x"},
		{"/m/m.json", "x", "file:///elsewhere/x", "/elsewhere/x"},
		{"/m/m.json", "x", "https://h/x", "https://h/x"},
		{"https://h/a/m.json?t=1", "b c#d", "", "https://h/a/b%20c%23d"},
		{"https://h/a/m.json", "x", "../y?z=1", "https://h/y?z=1"},
		{"https://h/a/m.json", "x", "s3://b/k", "s3://b/k"},
		{"s3://bucket/a/m.json", "b/x", "", "s3://bucket/a/b/x"},
		{"https://h/m.json", "x", "file:///etc/passwd", ""},
		{"https://h/m.json", "x", "http://%zz", ""},
	} {
		got, err := beside(c.manifest, File{Path: c.path, URL: c.url})
		if got != c.want || (err == nil) != (c.want != "") {
			t.Errorf("%+v: %q, %v", c, got, err)
		}
	}
}

// Whatever a manifest says, what passes stays inside its folder.
func FuzzParseManifest(f *testing.F) {
	f.Add([]byte("name: a\nversion: v1\nfiles: [{path: x/../../y, size: 1, sha256: " + sum + "}]"))
	f.Add([]byte(`{"name":"a","version":"v1","files":[{"path":"x","size":1e3,"sha256":"` + sum + `"}]}`))
	f.Fuzz(func(t *testing.T, raw []byte) {
		m, err := ParseManifest(raw)
		if err != nil {
			return
		}
		for _, file := range m.Files {
			if strings.Contains("/"+file.Path+"/", "/../") || strings.HasPrefix(file.Path, "/") || file.Size < 0 {
				t.Errorf("%q passed", file.Path)
			}
		}
		if m.Name == "" || strings.ContainsAny(m.Ref().String(), "/\\ ") || m.Bytes() < 0 {
			t.Errorf("%q passed", m.Ref())
		}
	})
}
